"""Call a server as schemathesis makes it up from the server's own OpenAPI document.

    python scripts/fuzz_api.py [--calls 5000] [--schemathesis PATH]

Serves the bundled model with a small pool and a short context, and calls it until that many calls are
made. Every answer must have a documented status, content type and body, none may be a server error or
take longer than ``TIMEOUT``, and afterwards the same processes must give the same answer as before.
Ends with status 1 if anything of this does not hold. Needs schemathesis 4 (``pip install
schemathesis``, in any environment).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

READY_TIMEOUT = 120.0  # seconds
TIMEOUT = 60  # seconds of one call
EXAMPLES = 140  # made-up calls of each operation in one run, beside the systematic ones
FLAGS = ["--context-length", "256", "--num-slots", "4096", "--max-running-requests", "16"]
PAUSING = "(pause|continue)_generation"  # in a run of their own: while paused, nothing is answered
# A document cannot say that a prompt is needed in one of two fields, or how long it may be. And a bad
# request for a stream is refused in the stream, with status 200.
UNCHECKED = "positive_data_acceptance,negative_data_rejection"
PROMPT = {"text": "What is 3 plus 4?", "sampling_params": {"temperature": 0, "max_new_tokens": 16}}

# A proxy in the environment must not see calls to this machine.
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def call(url: str, payload: dict[str, Any] | None = None) -> Any:
    """GET, or POST of a JSON body; the body of the answer, None if it is no JSON."""
    data = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with opener.open(request, timeout=TIMEOUT) as answer:
        body = answer.read()
    return json.loads(body) if answer.headers.get_content_type() == "application/json" else None


def start(log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server that is ready, and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ouro_sgl.launch_server", "--port", str(port), *FLAGS]
    environment = {**os.environ, "SGLANG_TORCH_PROFILER_DIR": str(log.parent)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment
        )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + READY_TIMEOUT
    while True:
        try:
            call(f"{url}/health")
            return process, url
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise SystemExit(f"the server did not start:\n{log.read_text()}") from None
            time.sleep(0.1)


def state(process: subprocess.Popen[bytes], url: str) -> dict[str, Any]:
    """What must be the same afterwards: the processes, and an answer."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0] for pid in children}
    answer = call(f"{url}/generate", PROMPT)
    return {
        # The process that tries out grammars may die of one.
        "processes": sorted(f"{title} {pid}" for pid, title in titles.items() if "grammar" not in title),
        "answer": [answer["output_ids"], answer["text"]],
    }


def run(schemathesis: str, url: str, folder: Path, examples: int, *selection: str) -> tuple[int, bool]:
    """One run over the operations of ``selection``: the number of calls, and whether all were right."""
    report = folder / "report.json"
    command = [schemathesis, "run", f"{url}/openapi.json", *selection, "--max-examples", str(examples)]
    command += ["--request-timeout", str(TIMEOUT), "--exclude-checks", UNCHECKED, "--continue-on-failure"]
    command += ["--generation-database", "none", "--report", "json", "--report-json-path", str(report)]
    done = subprocess.run(command, cwd=folder, check=False)
    summary = json.loads(report.read_text())
    return summary["test_cases"]["generated"], done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=5000, help="make at least this many (default: 5000)")
    parser.add_argument("--schemathesis", default="schemathesis", help="its command (default: on PATH)")
    args = parser.parse_args()
    schemathesis = shutil.which(args.schemathesis)
    if schemathesis is None:
        raise SystemExit(f"{args.schemathesis} is not installed: pip install schemathesis")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process, url = start(folder / "log")
        try:
            before = state(process, url)
            calls, right = run(schemathesis, url, folder, 20, "--include-path-regex", PAUSING)
            call(f"{url}/continue_generation", {})
            while calls < args.calls:
                selection = ["--exclude-path-regex", PAUSING, "--workers", "2"]
                more, fine = run(schemathesis, url, folder, EXAMPLES, *selection)
                calls, right = calls + more, right and fine
            alive = process.poll() is None and state(process, url) == before
            quiet = "Traceback" not in (folder / "log").read_text()
        finally:
            process.terminate()
            process.wait(60)
        print(f"\n{calls} calls: answers {'right' if right else 'WRONG'}, ", end="")
        print(f"server {'unchanged' if alive else 'CHANGED'}, log {'clean' if quiet else 'with a traceback'}")
        raise SystemExit(0 if right and alive and quiet else 1)


if __name__ == "__main__":
    main()

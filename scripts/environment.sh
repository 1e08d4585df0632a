# Sourced by serve, test and check. Sets PYTHON to an interpreter that has the dependencies: the
# current one if it satisfies pyproject.toml, else that of a virtual environment built here.
#
# use_python [extra ...]: the extras of pyproject.toml that must be there too.
# OURO_SGL_VENV names the virtual environment; default: .venv in the repository, and under CI=true
# a folder outside the clone, so that one build serves many clones.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
LOCK="$ROOT/scripts/requirements.lock"
SGLANG="sglang==0.5.23" # --no-deps: only its frontend language and its launch commands are used
export PYTHONPATH="$ROOT:$ROOT/kernels${PYTHONPATH:+:$PYTHONPATH}"

# Ctrl-C ends the script even when the command that it hit ends as if nothing had happened.
trap 'exit 130' INT

base_python() {
    local candidate
    for candidate in python3.11 python3.12 python3 python; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.11 or newer with venv and pip is needed" >&2
    return 1
}

venv_folder() {
    local base=$1 key
    if [ -n "${OURO_SGL_VENV:-}" ]; then
        echo "$OURO_SGL_VENV"
    elif [ "${CI:-}" = true ]; then
        key=$({ "$base" -V; cat "$LOCK"; echo "$SGLANG"; } | "$base" -c \
            'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:16])')
        echo "${XDG_CACHE_HOME:-$HOME/.cache}/ouro_sgl/venv-$key"
    else
        echo "$ROOT/.venv"
    fi
}

# Runs the rest of its arguments unless the stamp file already holds this text.
once() {
    local stamp=$1 text=$2
    shift 2
    if [ "$(cat "$stamp" 2>/dev/null)" != "$text" ]; then
        "$@" && printf '%s\n' "$text" >"$stamp"
    fi
}

install_dependencies() {
    local base=$1 venv=$2 stamp=$2/.dependencies clear=
    echo "Setting up $venv (once; some minutes, and 2 to 5 GB by the build of torch)" >&2
    if ! "$venv/bin/python" -m pip -V >/dev/null 2>&1; then
        # One interpreter over the environment of another would mix the two. Only what this function made
        # is cleared, which the stamp shows.
        if [ -e "$stamp" ] && [ "$(head -n 1 "$stamp")" != "$("$base" -V)" ]; then
            clear=--clear
        fi
        "$base" -m venv $clear "$venv" && touch "$stamp" || return 1
    fi
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-warn-conflicts \
        -r "$LOCK" || return 1
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps "$SGLANG"
}

# SGLang finds this package through its entry points, which only an installed package has. The links make it
# found before a folder of its name in the current directory, which the clone itself may be.
install_project() {
    local packages
    "$1/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation \
        --editable "$ROOT" || return 1
    packages=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return 1
    ln -sfn "$ROOT/ouro_sgl" "$packages/ouro_sgl" && ln -sfn "$ROOT/kernels/ouro_kernels" "$packages/ouro_kernels"
}

use_python() {
    local base venv version
    PYTHON=python3
    if "$PYTHON" "$ROOT/scripts/satisfied.py" "$@" 2>/dev/null; then
        return 0
    fi
    base=$(base_python) || return 1
    venv=$(venv_folder "$base") || return 1
    mkdir -p "$venv" || return 1
    # An environment that works is kept, whichever interpreter is first on the path now.
    version=$("$venv/bin/python" -V 2>/dev/null) || version=$("$base" -V) || return 1
    once "$venv/.dependencies" "$(echo "$version"; cat "$LOCK"; echo "$SGLANG")" install_dependencies "$base" "$venv" || return 1
    once "$venv/.project" "links to $ROOT $(cat "$ROOT/pyproject.toml")" install_project "$venv" || return 1
    PYTHON="$venv/bin/python"
    export PATH="$venv/bin:$PATH"
}

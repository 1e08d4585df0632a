"""Where a checkpoint comes from: a local folder, or a name on the Hugging Face hub. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

from ouro_sgl.errors import ConfigError

# What a checkpoint is made of. Nothing that could be executed or unpickled is ever fetched.
FILES = ["*.json", "*.safetensors", "chat_template.jinja"]


def resolve_checkpoint(model_path: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint; a hub name is fetched first (with a progress bar) or found in the cache.

    Raises:
        ConfigError: no such folder or hub name, no network, or a revision of a local folder.
    """
    folder = Path(model_path).expanduser()
    if os.path.isdir(folder):  # Path.is_dir raises where a name is too long
        if revision is not None:
            raise ConfigError(f"--revision {revision}: {model_path} is a local folder and has no revisions")
        return folder.resolve()
    if os.path.isfile(folder):
        raise ConfigError(f"{model_path} is a file; a checkpoint is a folder with config.json")
    if model_path.startswith(("/", ".", "~")) or model_path.count("/") > 1:
        raise ConfigError(f"{model_path} does not exist")
    return _fetch(model_path, revision)


def _fetch(name: str, revision: str | None) -> Path:
    # Imported here: most servers run from a local folder and start without this cost.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"{name!r} is not a local folder"
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES))
    except HFValidationError:
        raise ConfigError(f"{where} and cannot be a hub name") from None
    except GatedRepoError:
        raise ConfigError(f"{where}; the hub wants a login (or an accepted licence) for it") from None
    except RepositoryNotFoundError:
        raise ConfigError(f"{where} and the hub does not know it (or wants a login)") from None
    except RevisionNotFoundError:
        raise ConfigError(f"{where}; on the hub it has no revision {revision!r}") from None
    except LocalEntryNotFoundError:
        raise ConfigError(
            f"{where}, the hub cannot be reached (offline?) and no copy is in the local cache"
        ) from None
    except Exception as error:  # the errors of the transport differ between versions of the hub's client
        raise ConfigError(
            f"{where} and fetching it from the hub failed: {type(error).__name__}: {error}"
        ) from error

"""Other weights for a model that is running."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from ouro_sgl.errors import ConfigError
from ouro_sgl.messages import ExitMode
from ouro_sgl.models.config import OuroConfig, load_config
from ouro_sgl.models.ouro import OuroModel
from ouro_sgl.models.weights import Head, Weights, load_lookahead_head, load_weights

# What may differ: how the server runs a model was settled at its start.
NOT_COMPARED = {"max_position", "early_exit_threshold", "dtype", "end_ids"}


def replace_weights(model: OuroModel, folder: Path) -> dict[ExitMode, Head]:
    """Overwrite the weights of ``model`` in place, once all new ones are loaded and checked.

    Nothing may run that reads them. Memory for a second copy is needed on the host meanwhile.

    Returns:
        The exit heads that come with the new weights; where a mode is missing, its head stays.

    Raises:
        ConfigError: the folder does not hold weights of the same shapes, or cannot be read; the model is
            unchanged.
    """
    try:
        weights, lookahead = _load(model, folder)
    except ConfigError:
        raise
    except Exception as error:
        # A client names the folder, and nothing is overwritten yet: whatever is wrong with it, or with
        # the memory for a second copy, is no reason for the worker to end.
        raise ConfigError(f"{folder} cannot be loaded: {type(error).__name__}: {error}") from error
    model.replace(weights)
    return {} if lookahead is None else {ExitMode.LOOKAHEAD: lookahead}


def _load(model: OuroModel, folder: Path) -> tuple[Weights, Head | None]:
    """The weights in ``folder``, checked against ``model``, on the CPU, and its lookahead head, if any."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    config = load_config(folder)
    for field in fields(OuroConfig):
        ours, theirs = getattr(model.config, field.name), getattr(config, field.name)
        if field.name not in NOT_COMPARED and ours != theirs:
            raise ConfigError(f"{folder}: {field.name} is {theirs}, the model that is served has {ours}")
    weights = load_weights(folder, model.config, model.dtype, "cpu")
    return weights, load_lookahead_head(folder, model.config.hidden_size)

# SPDX-License-Identifier: Apache-2.0
"""The `trl-delta` command: TRL's training scripts with delta weight sync, configured by the same YAML file.

trl-delta grpo --config run.yaml                       one process
accelerate launch -m trl_delta grpo --config run.yaml  several
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

from delta_wire.errors import DeltaError, SetupError

# command: module with make_parser() and main(), trainer it constructs, module it takes the trainer from
COMMANDS = {
    "grpo": ("trl.scripts.grpo", "GRPOTrainer", "trl"),
    "async_grpo": ("trl_delta.async_grpo", "AsyncGRPOTrainer", "trl.experimental.async_grpo"),
    "sft": ("trl.scripts.sft", "SFTTrainer", "trl"),
    "dpo": ("trl.scripts.dpo", "DPOTrainer", "trl"),
}
USAGE = f"""usage: trl-delta {{{",".join(COMMANDS)}}} [--config run.yaml] [--option value ...]

Trains as `trl` does and publishes the weights after every optimizer step. Options and the keys of the file are those
of `trl`, and:

  delta_sync              the bucket's address, short for delta_sync_bucket
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a training; returns the exit code."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if command in ("-h", "--help"):
        print(USAGE + _settings(), end="")
        return 0
    if command not in COMMANDS:
        print(f"{USAGE}\ntrl-delta: error: expected one of {', '.join(COMMANDS)}, found {command!r}", file=sys.stderr)
        return 2
    try:
        train(command, rest)
    except DeltaError as error:
        print(f"trl-delta {command}: error: {error}", file=sys.stderr)
        return 2
    return 0


def train(command: str, arguments: Sequence[str]) -> None:
    """Parse options and YAML file, and train.

    Args:
        command (`str`): one of [`COMMANDS`].
        arguments: options, as on the command line.

    Raises:
        [`~delta_wire.errors.SetupError`]: with the name of the key, for settings that cannot work.
    """
    module = importlib.import_module(COMMANDS[command][0])
    parsed = _parse(module, command, arguments)
    config = parsed.pop()
    config.require_bucket(None)
    with _publishing(command, config):
        module.main(*parsed)


def _parse(module: Any, command: str, arguments: Sequence[str]) -> list[Any]:
    import yaml
    from trl.scripts.utils import TrlParser

    from trl_delta.config import DeltaSyncConfig

    class Parser(TrlParser):
        def set_defaults_with_config(self, **settings: Any) -> list[str]:
            return super().set_defaults_with_config(**_spell_out(settings))

    types: Any = [*module.make_parser().dataclass_types, DeltaSyncConfig]
    parser = Parser(types, prog=f"trl-delta {command}")
    parser.add_argument("--delta_sync", dest="delta_sync_bucket", help="Short for --delta_sync_bucket.")
    try:
        return list(parser.parse_args_and_config(list(arguments)))
    except OSError as error:
        raise SetupError(f"{error.filename}: cannot read the configuration: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        # of the parser: keys that nobody knows, a file that is none
        raise SetupError(str(error)) from error


def _spell_out(settings: dict[str, Any]) -> dict[str, Any]:
    if "delta_sync" not in settings:
        return settings
    bucket = settings["delta_sync"]
    if not isinstance(bucket, str) or "delta_sync_bucket" in settings:
        raise SetupError(
            f"delta_sync: expected the bucket's address, given once, found {bucket!r}; other settings have keys of "
            "their own (delta_sync_steps: 1)"
        )
    return {name: value for name, value in settings.items() if name != "delta_sync"} | {"delta_sync_bucket": bucket}


@contextmanager
def _publishing(command: str, config: Any) -> Iterator[None]:
    """TRL's scripts construct a trainer that publishes."""
    _, name, home = COMMANDS[command]
    namespace: Any = importlib.import_module(home)
    trainer = getattr(namespace, name)
    setattr(namespace, name, _publishing_trainer(trainer, config))
    try:
        yield
    finally:
        setattr(namespace, name, trainer)


def _publishing_trainer(trainer: type, config: Any) -> type:
    from inspect import signature

    from trl_delta.callback import DeltaSyncCallback
    from trl_delta.transfer import DeltaWeightTransfer, attach, attachable, server_mode

    takes_transfer = "weight_transfer" in signature(trainer.__init__).parameters

    class Publishing(trainer):
        def __init__(self, *args: Any, **kwargs: Any):
            with ExitStack() as stack:
                if takes_transfer:
                    kwargs.setdefault("weight_transfer", DeltaWeightTransfer())
                elif getattr(kwargs.get("args"), "use_vllm", False):
                    stack.enter_context(server_mode())
                super().__init__(*args, **kwargs)
            # report_to: [delta_sync] says the same
            self.callback_handler.callbacks[:] = [
                callback for callback in self.callback_handler.callbacks if not isinstance(callback, DeltaSyncCallback)
            ]
            if attachable(self):
                attach(self, config=config)
            else:
                self.callback_handler.callbacks.insert(0, DeltaSyncCallback(config=config))

    # what it is called goes into model cards and logs
    Publishing.__name__, Publishing.__qualname__ = trainer.__name__, trainer.__qualname__
    return Publishing


def _settings() -> str:
    from trl_delta.config import DeltaSyncConfig

    lines = [f"  {field.name:<30}{field.metadata['help']}" for field in fields(DeltaSyncConfig)]
    return "\n".join(lines) + "\n"

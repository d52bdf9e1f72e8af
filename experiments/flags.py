"""Flags that the binaries share, and how a binary starts: errors for the user, compiled programs
kept on disk."""

import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from experiments.report import check_out_folder
from kvgrain_jax.errors import ConfigError, KVGrainError

OUT = flags.DEFINE_string(
    "out", None, "Folder for result.json and pictures; the config's if unset."
)
COMPILATION_CACHE = flags.DEFINE_string(
    "compilation_cache",
    None,
    "Folder that keeps compiled programs, so that a second start is fast; kvgrain-jax in the user's "
    "cache folder if unset, nothing is kept if 'none'.",
)


def define_warmup() -> flags.FlagHolder[bool]:
    """Defines ``--warmup``, for a binary that runs an engine."""
    holder = flags.DEFINE_bool(
        "warmup",
        False,
        "Only compile every program of the config, with a progress bar, so that later starts find "
        "them in the compilation cache.",
    )

    @flags.multi_flags_validator(
        ["warmup", "compilation_cache"],
        "--warmup fills the compilation cache, and --compilation_cache=none keeps nothing; leave one "
        "of them out.",
    )
    def _keeps_something(values: Mapping[str, Any]) -> bool:
        return not values["warmup"] or values["compilation_cache"] != "none"

    return holder


INTERRUPTED = 130  # exit code of a program that Ctrl-C ended


def run(main: Callable[[], int | None]) -> None:
    """Runs a binary: parses flags, then ``main()``; its value is the exit code.

    An error that KVGrain raises on purpose is printed as a sentence, without a stack trace, and
    gives exit code 1; Ctrl-C gives 130.
    """

    def guarded(argv: list[str]) -> int | None:
        if len(argv) > 1:
            raise app.UsageError(f"{argv[1]!r} is not a flag of this binary.")
        try:
            if not flags.FLAGS["verbosity"].present:
                logging.set_verbosity(logging.WARNING)
            keep_compiled_programs(COMPILATION_CACHE.value)
            return main()
        except KVGrainError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("Interrupted.", file=sys.stderr)
            return INTERRUPTED

    app.run(guarded, flags_parser=_parse)


def run_config(function: Callable[[dict[str, Any]], object]) -> None:
    """Runs a binary that is a function of a config: the fields of ``--config``, with ``--out``."""
    flags.disclaim_key_flags()  # --help lists what follows as flags of the binary
    holder = config_flags.DEFINE_config_file("config", None, "File with a get_config().")
    flags.adopt_module_key_flags(sys.modules[__name__])
    flags.mark_flag_as_required("config")

    def main() -> None:
        fields = read_config(holder)
        if OUT.value is not None:
            fields["out"] = OUT.value
        function(fields)

    run(main)


def read_config(holder: flags.FlagHolder[ConfigDict]) -> dict[str, Any]:
    """Fields of the config that a flag names.

    Raises:
      ConfigError: the file cannot be read.
    """
    try:
        return holder.value.to_dict()
    except OSError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise ConfigError(f"The config file cannot be read: {reason}.") from error


def _parse(argv: list[str]) -> list[str]:
    """``argv`` without the flags; what is wrong with them is printed as a sentence."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        message = str(error).strip()
        if "Traceback" in message:  # a config file that raised; the last line says what
            message = message.splitlines()[-1].rpartition("Error: ")[2]
    except (AttributeError, KeyError) as error:
        # ml_collections wraps the error of the dictionary that holds the fields.
        inner = error.args[0].args[0] if isinstance(error.args[0], Exception) else error.args[0]
        message = f"The config has no such field: {' '.join(str(inner).split())}"
    except (TypeError, ValueError) as error:
        message = f"The config cannot be set so: {error}"
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


def keep_compiled_programs(folder: str | None) -> None:
    """Turns JAX's persistent compilation cache on.

    Args:
      folder: where; None is ``kvgrain-jax`` in the user's cache folder, ``"none"`` turns it off.

    Raises:
      ConfigError: the folder that was asked for cannot be written.
    """
    if folder == "none":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        folder = str(pathlib.Path(base) / "kvgrain-jax")
    jax.config.update("jax_compilation_cache_dir", str(check_out_folder(folder)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

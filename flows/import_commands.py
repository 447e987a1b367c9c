"""`kiln import`: the recipe of a configuration of another tool."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import shorten
from typing import Annotated

import typer

from tasks.imports.translation import Translation

#: Options of the other tools' scripts are words of the command line that is imported.
AS_WORDS = {"ignore_unknown_options": True}
Output = Annotated[Path | None, typer.Option("--output", help="File of the recipe, not stdout.")]

imports = typer.Typer(
    help="Write the recipe of a configuration of another tool; stderr lists what has no equivalent."
)


@imports.command(context_settings=AS_WORDS)
def kohya(
    what: Annotated[
        list[str],
        typer.Argument(
            help="Dataset TOML, training TOML, folder of folders `10_name class`, or the command "
            "line of a script; several together."
        ),
    ],
    output: Output = None,
) -> None:
    """Import a configuration of kohya's sd-scripts."""
    from tasks.imports import kohya as module

    _write(module.read(what), f"kohya: {' '.join(what)}", output)


@imports.command(context_settings=AS_WORDS)
def diffusers(
    what: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="Command line of an example script, or its file."),
    ],
    output: Output = None,
) -> None:
    """Import a command line of diffusers' train_text_to_image*.py or train_dreambooth*.py."""
    from tasks.imports import diffusers as module

    _write(module.read(what), f"diffusers: {' '.join(what)}", output)


@imports.command()
def simpletuner(
    folder: Annotated[str, typer.Argument(help="Folder of config.json and multidatabackend.json.")],
    output: Output = None,
) -> None:
    """Import a configuration of SimpleTuner."""
    from tasks.imports import simpletuner as module

    _write(module.read(folder), f"SimpleTuner: {folder}", output)


def _write(translation: Translation, origin: str, output: Path | None) -> None:
    words = " ".join(translation.without_secrets(origin).split())
    text = translation.text(shorten(words, 90))
    for line in translation.remarks:
        print(f"import: {line}", file=sys.stderr)
    if output is None:
        print(text, end="")
        return
    output.write_text(text, encoding="utf-8")
    print(f"recipe: {output} (next: kiln plan {output}, kiln run {output})")

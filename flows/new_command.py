"""The options of `kiln new`; flows/new_recipe.py asks the questions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.command_errors import error_as_json


def new(
    pictures: Annotated[
        str | None,
        typer.Argument(
            help="Folder of pictures, kohya's folder of folders, list (parquet, csv, json lines), "
            "tars, or data set of the hub (owner/name)."
        ),
    ] = None,
    teach: Annotated[
        str | None, typer.Option(help="What to teach: subject, style or everything.")
    ] = None,
    word: Annotated[
        str | None, typer.Option(help="The word of a subject or style, such as 'ohwx dog'.")
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            "--machine",
            help="The machine that trains, if it is not this one: RTX 3060, 24GB, 4 x H100, "
            "v5p-8, npu, hpu or cpu.",
        ),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Base: sdxl, a shipped recipe, a path, or a hub id.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="A prompt to judge by; may be repeated.")
    ] = None,
    price: Annotated[
        float | None,
        typer.Option("--price-per-hour", min=0, help="Price per hour and accelerator."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="File of the recipe; default: NAME.yaml here.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Take the ready answers, and ask nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="As --yes, and print one JSON object.")
    ] = False,
) -> None:
    """Write a recipe for pictures: five questions with ready answers, and a plan that it fits.

    Exit code: 0 the recipe is written, 2 a wrong answer, or nothing fits: nothing is written.
    """
    with error_as_json(as_json):
        from flows.new_recipe import Given
        from flows.new_recipe import new as ask

        given = (pictures, teach, word, machine, base, tuple(prompt or ()), price, output, yes)
        ask(Given(*given), as_json=as_json)

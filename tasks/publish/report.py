"""`report.html`: the output of every stage on one self-contained page."""

from __future__ import annotations

import html
import importlib
from collections.abc import Sequence

from artifacts.store import Artifact
from configs.load import dump
from configs.schema import Recipe
from tasks.panels import to_html
from tasks.stage import StageResult

NAME = "report.html"
_STYLE = """
:root { color-scheme: light dark; --ink: #2b2118; --paper: #fffdf9; --line: #e4d9cb; }
@media (prefers-color-scheme: dark) { :root { --ink: #efe6da; --paper: #1d1813; --line: #463b30; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 3rem; border-bottom: 2px solid #b5451b; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem; text-align: left;
         overflow-wrap: anywhere; }
figure { margin: 1rem 0; } img { max-width: 100%; image-rendering: pixelated; background: #fff; }
pre { overflow-x: auto; border: 1px solid var(--line); padding: 1rem; }
nav a { margin-right: 1rem; } .outcome { font-weight: normal; opacity: .7; }
"""


def page(recipe: Recipe, stages: Sequence[tuple[Artifact, StageResult]]) -> str:
    """The HTML page, with all external text escaped.

    Args:
        stages: artifact and result of each stage, in the order of the flow.
    """
    title = html.escape(f"{recipe.publish.name} — Kilnworks report")
    names = [artifact.stage for artifact, _ in stages]
    nav = " ".join(f'<a href="#{name}">{name}</a>' for name in names)
    sections = [_section(artifact, result) for artifact, result in stages]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(recipe.publish.name)}</h1>"
        f"<p>{html.escape(recipe.description)}</p><nav>{nav}</nav>"
        + "\n".join(sections)
        + f"<h2>Recipe</h2><pre>{html.escape(dump(recipe))}</pre></body></html>\n"
    )


def _section(artifact: Artifact, result: StageResult) -> str:
    name = artifact.stage
    show = importlib.import_module(f"tasks.{name}").show
    outcome = html.escape(f"{result.outcome} · {artifact.key[:12]}")
    return f'<h2 id="{name}">{name} <span class="outcome">{outcome}</span></h2>' + to_html(
        show(artifact)
    )

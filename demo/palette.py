"""The styles of the demo's pictures: ink and paper, in words and in colours."""

from dataclasses import dataclass

Rgb = tuple[int, int, int]


@dataclass(frozen=True)
class Style:
    """Ink and paper of a picture, as caption phrases and as colours."""

    ink: str
    paper: str
    ink_rgb: Rgb
    paper_rgb: Rgb
    grainy: bool = False

    @property
    def name(self) -> str:
        return f"{self.ink} on {self.paper}"


INKS: dict[str, Rgb] = {
    "black": (25, 25, 30),
    "red": (215, 35, 40),
    "blue": (35, 70, 210),
    "green": (20, 140, 60),
    "purple": (130, 45, 160),
    "orange": (240, 130, 20),
}
PAPERS: dict[str, Rgb] = {
    "white": (250, 250, 248),
    "yellow": (252, 236, 150),
    "pink": (250, 200, 215),
}
CHALK: Rgb = (240, 242, 235)

STYLES: tuple[Style, ...] = (
    *(
        Style(f"{ink} ink", f"{paper} paper", INKS[ink], PAPERS[paper])
        for ink in INKS
        for paper in PAPERS
    ),
    # Gold on navy teaches the base light-on-dark pictures, which LoRA needs.
    Style("white chalk", "a black board", CHALK, (32, 33, 36), grainy=True),
    Style("gold ink", "navy paper", (235, 190, 70), (22, 30, 80)),
    Style("white chalk", "a green board", CHALK, (30, 85, 62), grainy=True),
)
NEW_STYLE = "white chalk on a green board"
# The UNet of the base is trained without chalk. One that knows chalk on a black board combines it
# with "green", and draws the new style in half of all cases.
BASE_STYLES = tuple(style.name for style in STYLES if style.ink != "white chalk")


def style_index(name: str) -> int:
    """The index of a style in STYLES. Raises ValueError for an unknown name."""
    for index, style in enumerate(STYLES):
        if style.name == name:
            return index
    raise ValueError(f"no style is called {name!r}; the styles are: {[s.name for s in STYLES]}")

"""What was compiled; the time is made up: a millisecond each."""

from hpu_emulator import graphs


class _Compilations:
    def stats(self) -> list[tuple[str, int]]:
        """As Intel's: microseconds."""
        count = graphs.compiled()
        return [("TotalNumber", count), ("TotalTime", 1000 * count), ("AvgTime", 1000)]


def metric_global(name: str) -> _Compilations | None:
    """`graph_compilation` is the one there is."""
    return _Compilations() if name == "graph_compilation" else None

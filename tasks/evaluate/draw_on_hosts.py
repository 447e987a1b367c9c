"""A generate job on the hosts of a cluster: each draws whole batches, and computes some losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from artifacts.filesystems import delete_tree, entries, fetch_files, matching
from artifacts.models import digest_model_file, put_model
from artifacts.store import Draft, Store
from runtimes.process.job import Drawing, GenerateJob, Job
from tasks.child_process import Event
from tasks.hosts.attempts import HostsJob, in_store, run_hosts_job
from tasks.hosts.choose import Hosts


@dataclass(frozen=True)
class DrawOnHosts:
    """Runs generate jobs, as `tasks.child_process.run_job`; hosts write to the store.

    Args:
        draft: of the evaluation, in whose folder unfinished pictures lie.
    """

    hosts: Hosts
    draft: Draft

    def __call__(self, job: Job, on_event: Callable[[Event], None]) -> Event:
        """Draw what is missing in the job's folders, which are local. Raises as `run_hosts_job`."""
        assert isinstance(job, GenerateJob)
        store = self.draft.store
        places = {drawing.out: self._place(drawing.out) for drawing in job.drawings}
        sent = self._sent(job, places)

        def count() -> int:
            return sum(len(matching(store.fs, place, "*.png")) for place in places.values())

        had = count()
        total = len(job.prompts) * len(job.drawings)

        def tell(event: Event) -> None:
            """Pass on each host's events, with the pictures of all hosts."""
            if event["event"] == "drawn":
                event = event | {"done": count(), "total": total}
            if event["event"] != "result":  # other hosts may still draw
                on_event(event)

        kept = HostsJob(self.draft.uri, asdict(sent), together=False, kept="picture", count=count)
        engine = self.hosts.engine(self.draft.uri, store)
        cluster = self.hosts.cluster
        result = run_hosts_job(engine, kept, tell, agents=self.hosts.agents, cluster=cluster)
        on_event(result | {"drawn": count() - had})
        if not store.is_local:
            _fetch(store, places)
        return result

    def _place(self, out: str) -> str:
        """Where hosts write a drawing: its folder if it is in the store, else a URL there."""
        if self.draft.store.is_local:
            return out
        return f"{self.draft.uri}/drawing/{Path(out).name}"

    def _sent(self, job: GenerateJob, places: dict[str, str]) -> GenerateJob:
        """The job with models and references that all hosts can read."""
        drawings = tuple(
            Drawing(
                places[drawing.out],
                {name: self._readable(part) for name, part in drawing.parts.items()},
                None if drawing.lora is None else self._readable(drawing.lora),
            )
            for drawing in job.drawings
        )
        named = {path for paths in job.references for path in paths}
        kept = {path: self._readable(path) for path in sorted(named)}
        return replace(
            job,
            model=self._readable(job.model),
            vae=None if job.vae is None else self._readable(job.vae),
            drawings=drawings,
            references=tuple(tuple(kept[path] for path in paths) for paths in job.references),
            hosts=self.hosts.count,
        )

    def _readable(self, place: str) -> str:
        """A folder or file that all hosts can read; copied to the store unless it is in it."""
        store = self.draft.store
        path = Path(place)
        if store.is_local and path.resolve().is_relative_to(Path(store.root).resolve()):
            return place
        if path.is_dir():
            return in_store(store, place)
        return f"{put_model(store, digest_model_file(path), {path.name: path})}/{path.name}"


def _fetch(store: Store, places: dict[str, str]) -> None:
    """Move the files of each drawing from the store to its local folder."""
    for out, place in places.items():
        folder = store.fs._strip_protocol(place)
        fetch_files(store.fs, folder, [entry["name"] for entry in entries(store.fs, folder)], out)
        delete_tree(store.fs, folder)

import json, os, time
from pathlib import Path
from tasks.process import run_job
import pytest

VAL = {"every": 3, "samples": 4, "draws": 2}
def test_two(make_job):
    seen = []
    kw = dict(steps=6, log_every=1, checkpoint_every=2, validation=VAL, keep_best=1, ema_decay=0.9, profile={"start": 1, "steps": 1})
    one, two = make_job("one", **kw), make_job("two", processes=2, **kw)
    run_job(one)
    t=time.time(); run_job(two, seen.append); print("WALL", time.time()-t)
    for e in seen: print("EV", {k: v for k, v in e.items() if k not in ("versions","path","time")})
    a, b = ([json.loads(l) for l in Path(j.out, "history.jsonl").read_text().splitlines()] for j in (one, two))
    for x, y in zip(a, b): print("HI", x, y)
    print("FILES", sorted(str(p.relative_to(two.work)) for p in Path(two.work).rglob("*") if p.is_file()))
    bad = make_job("bad", processes=2, steps=20, learning_rate=1e18, max_grad_norm=None, log_every=1)
    t=time.time()
    with pytest.raises(Exception) as c: run_job(bad)
    print("ERR", type(c.value), c.value, time.time()-t)
    bad = make_job("bad2", processes=2, steps=20, learning_rate=1e18, max_grad_norm=None, log_every=1, divergence={"action": "skip", "most": 1})
    with pytest.raises(Exception) as c: run_job(bad)
    print("ERR", type(c.value), c.value)

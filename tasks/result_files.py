"""Names of the files of an evaluation, and those that a published model has in addition."""

METRICS = "metrics.json"
BOOTSTRAP = "bootstrap.npz"  # resampled values of every metric, for paired differences
GRID = "before_after.png"

RECIPE = "recipe.yaml"
GATE = "gate.json"
REPORT = "report.html"  # outside the manifest, since it shows the publication itself

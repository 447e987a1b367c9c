"""Exit codes of `kiln`."""

FAILED = 1
WRONG_INPUT = 2
REJECTED = 3
INTERRUPTED = 130
#: Class of errors -> its exit code. A ValueError is WRONG_INPUT, any other error FAILED.
OF_ERRORS = {"Rejected": REJECTED, "SmokeTestFailed": REJECTED}

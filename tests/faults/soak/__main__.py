"""``python -m tests.faults.soak``."""

from tests.faults.soak.command import app

if __name__ == "__main__":
    app()

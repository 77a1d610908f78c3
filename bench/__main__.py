"""``python -m bench``."""

from bench.ttft import app

if __name__ == "__main__":
    app()

"""`python -m layerpush`: the `layerpush` command."""

from layerpush.apps.cli import app

if __name__ == "__main__":
    app(prog_name="layerpush")

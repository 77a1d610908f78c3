"""What requests cost that only wait, from the JSON of ``python -m bench.waiting``."""

from __future__ import annotations

from statistics import median

from bench.markdown import Result, conditions, number_table

SIDES = {"D": "a registration on D, until P's push ends", "P": "a computed prompt on P, until D registers"}


def table(result: Result) -> str:
    headings = ("what waits", "requests", "of Python's lock", "a turn")
    rows = [
        (
            SIDES[row["side"]],
            str(row["requests"]),
            f"{median(row['share']):.1%}",
            f"{1e6 * median(row['turn_s']):.0f} us",
        )
        for row in result["rows"]
    ]
    about = (
        f"Medians of {result['rounds']} samples. The share of Python's lock is the processor time of the writer thread "
        "in a second in which no message comes. A turn visits every part of the writer and finds nothing."
    )
    return f"{number_table(headings, rows)}\n\n{about} {conditions(result)}"

"""What happens when something goes wrong: every row of the matrix in docs/design/failures.md, on real engines."""

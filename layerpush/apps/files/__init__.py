"""Files for operators, which `layerpush files` prints: a dashboard, alert rules, manifests."""

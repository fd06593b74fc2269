"""Self-contained HTML pages: plans before a launch, and reports of runs."""

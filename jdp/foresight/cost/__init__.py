"""What a run costs: time and money (`bill`), and the time that failures take (`goodput`)."""

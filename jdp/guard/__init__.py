"""Fault tolerance while a run goes on: deadlines, what each rank last did, checks of the state's health."""

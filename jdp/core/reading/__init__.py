"""Programs are read here: operations, collectives and FLOPs of jaxprs."""

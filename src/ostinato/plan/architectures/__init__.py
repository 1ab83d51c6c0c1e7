"""One file per architecture: its hyperparameters as a dataclass, and the function from config.json to ModelSpec."""

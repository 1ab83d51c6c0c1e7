"""The router in front of several servers: `ostinato route`."""

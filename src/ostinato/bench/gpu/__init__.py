"""One run on a GPU: its tests, then its measurements, within minutes, and a report of both."""

"""The flight recorder: all that enters an engine, by step, in files from which `ostinato replay` runs it again."""

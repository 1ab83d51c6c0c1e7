"""The command line. Its modules import torch only inside the commands that compute."""

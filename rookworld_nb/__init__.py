import os

__version__ = "0.1.0"

# How long threads that wait for one another keep their core busy (11_hardware); read once, when PyTorch is imported.
if 'OMP_WAIT_POLICY' not in os.environ: os.environ.setdefault('GOMP_SPINCOUNT', '3000')

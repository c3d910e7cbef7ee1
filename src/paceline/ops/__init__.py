"""Operations: `reference` defines them in plain torch, `numba_cpu` fuses them on a CPU."""

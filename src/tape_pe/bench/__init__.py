"""What encodings cost: time, floating-point operations, memory and cache, always beside RoPE in the same run."""

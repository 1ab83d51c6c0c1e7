"""Operations that only a vision encoder calls."""

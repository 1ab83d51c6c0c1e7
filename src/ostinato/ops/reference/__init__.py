"""Operations whose rows keep states in slots: the part "state" of a model."""

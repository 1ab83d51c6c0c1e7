"""Operations of the models.

`facts.py` has a row for each operation. The file named after an operation holds its reference, which is the definition.
`kernels.py` makes the kernels that the plan chose.
"""

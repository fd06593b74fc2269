"""Programs are read here, and nowhere transformed.

jaxprs       one operation: what runs inside it, its source line
collectives  the collectives that a traced step issues
flops        multiplications and additions of a traced function
"""

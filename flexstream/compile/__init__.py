"""From a plan to a program, and to C: lowering, code generation, and which variant runs."""

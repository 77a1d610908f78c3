"""`layerpush estimate`: what a push would cost, before anything is installed on the engines' hosts."""

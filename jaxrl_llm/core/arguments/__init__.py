"""What arguments of parts and methods may be: kinds, ranges, choices and origins, and signatures that say so."""

"""Plans for people: tables in a terminal."""

"""Every operation of the table in every legal layout."""

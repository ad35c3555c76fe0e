"""Import paths under which other code knows parts of this library; see :mod:`.transformer`."""

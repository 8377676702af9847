"""The run file: ``models`` says what may stand in it, ``loading`` reads and checks it, ``explaining`` prints it."""

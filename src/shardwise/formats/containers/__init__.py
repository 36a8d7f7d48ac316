"""What lies in files of other programs: values, and where arrays are; nothing is executed."""

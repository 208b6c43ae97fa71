"""`diyfa report`: show benchmark files of any number of devices as tables and as one HTML page."""

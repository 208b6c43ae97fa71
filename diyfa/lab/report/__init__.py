"""`diyfa report`: where diyfa stands on any number of devices, as text and as one HTML page."""

"""``ascendspeed.data``: what the columns of a data set mean."""

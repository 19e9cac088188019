"""Files of earlier releases and of other servers as settings of this one."""

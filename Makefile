# A convenience only: deploy/dev does the work and needs nothing but a POSIX shell.
.PHONY: run test lint install clean
run test lint install clean:
	@sh deploy/dev $@

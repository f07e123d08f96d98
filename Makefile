# A convenience only: deploy/dev does the work and needs nothing but a POSIX shell.
.PHONY: run test lint clean
run test lint clean:
	@sh deploy/dev $@

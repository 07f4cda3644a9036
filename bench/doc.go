// Package bench measures commitbox beside its peers and beside the same work written by hand.
//
// Every benchmark is one family: all its contenders run in one process, against one PostgreSQL that was started for it
// with fsync, full_page_writes and synchronous_commit on, in interleaved rounds whose order rotates. A table of medians
// is printed, with the ratios, the bounds that the project has set itself, and ok or MISSED. A missed bound does not
// fail the run. Figures of two runs, or of two machines, are not to be compared; the ratios of one run are.
//
//	go test -run '^$' -bench . -timeout 60m           # some ten minutes on two cores
//	BENCH_FULL=1 go test -run '^$' -bench . -timeout 4h   # the sizes that the bounds name; needs about 20 GB of disk
//	BENCH_SMALL=1 go test -run '^$' -bench .          # does every family work; its figures mean nothing
//
// BENCH_ROUNDS sets the number of rounds, BENCH_SHARED_BUFFERS the server's shared_buffers. COMMITBOX_PG_BIN names the
// PostgreSQL programs. A family runs once, whatever -benchtime says by default.
package bench

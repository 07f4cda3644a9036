// Package scheduler runs jobs by cron lines and intervals, each tick once across all replicas.
//
// A tick is claimed in the table schedule_job, by the database's clock: of any number of replicas one runs it, and a
// clock that is wrong in a process changes nothing. The row keeps the last run: when, by whom, how long, with what
// outcome. A panic or a hang of a job ends neither the process nor the ticks of other jobs.
//
// Not promised: that a tick runs to its end. A run whose process dies is seen as died once its lease has ended and is not
// run again (see [Job.CatchUp] for the exception); a job has to be something that its next tick can carry on with.
package scheduler

package inbox

// witness remembers what was learned of a database's identity, to notice that it was restored.
type witness struct {
	identity Identity
	written  uint64 // the furthest position in the log that was seen under it
	known    bool
	suspect  bool
}

// learn takes what the database says of itself now, and says whether copies that are bound to this identity can be
// trusted. A database whose log, or whose generation, is behind what was seen before is an older one under the same name;
// so it stays until somebody rotates the generation. Another system or time line is another history by itself.
func (w *witness) learn(now Identity, written uint64) (trusted bool) {
	sameHistory := w.known && now.System == w.identity.System && now.Timeline == w.identity.Timeline
	switch {
	case !sameHistory, now.Generation > w.identity.Generation:
		w.identity, w.written, w.suspect = now, written, false
	case now.Generation < w.identity.Generation, written < w.written:
		w.suspect = true
	default:
		w.written = written
	}
	w.known = true
	return !w.suspect
}

package inbox

import "time"

// AwaitCopies returns once no copy is on its way to the cache.
func (b *Box) AwaitCopies() {
	for len(b.copies) > 0 {
		time.Sleep(100 * time.Microsecond)
	}
}

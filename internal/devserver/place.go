package devserver

// place is where a new server lives.
type place struct {
	dir  string
	port int
	as   account
}

// newPlace makes a private folder and picks a port. The server runs as the first
// of the accounts that exists if the caller is root.
func newPlace(kind string, accounts ...string) (place, error) {
	as, err := unprivileged(accounts...)
	if err != nil {
		return place{}, err
	}
	port, err := freePort()
	if err != nil {
		return place{}, err
	}
	dir, err := newFolder(kind, as)
	return place{dir: dir, port: port, as: as}, err
}

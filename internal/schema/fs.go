package schema

import (
	"io"
	"io/fs"
	"strings"
)

// FS returns a view of fsys whose .sql files name the chosen schema. Other files are passed on as they are.
func (n Name) FS(fsys fs.FS) fs.FS {
	if n.name == "" {
		return fsys
	}
	return rewritingFS{n, fsys}
}

type rewritingFS struct {
	schema Name
	fsys   fs.FS
}

func (r rewritingFS) Open(name string) (fs.File, error) {
	file, err := r.fsys.Open(name)
	if err != nil || !strings.HasSuffix(name, ".sql") {
		return file, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(file)
	if err != nil {
		return nil, err
	}
	text = []byte(r.schema.rewrite(string(text)))
	return &rewrittenFile{info: rewrittenInfo{info, int64(len(text))}, Reader: strings.NewReader(string(text))}, nil
}

func (r rewritingFS) ReadDir(name string) ([]fs.DirEntry, error) { return fs.ReadDir(r.fsys, name) }

type rewrittenFile struct {
	info rewrittenInfo
	*strings.Reader
}

func (f *rewrittenFile) Stat() (fs.FileInfo, error) { return f.info, nil }
func (f *rewrittenFile) Close() error               { return nil }

type rewrittenInfo struct {
	fs.FileInfo
	size int64
}

func (i rewrittenInfo) Size() int64 { return i.size }
